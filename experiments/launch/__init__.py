"""Runs of many processes that are started from one command."""
