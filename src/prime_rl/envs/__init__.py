"""Environments in worker processes: the wire (`protocol`), the process (`worker`), its supervisor (`pool`)."""
