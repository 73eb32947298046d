"""The runs: a file each, with the claim it shows, the number to expect and the command."""
