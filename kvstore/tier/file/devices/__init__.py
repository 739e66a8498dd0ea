"""Several directories as one file tier: see `devices.py`."""
