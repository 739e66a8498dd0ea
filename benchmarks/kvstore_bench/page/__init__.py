"""The page in a real Chromium, on a real daemon with a workload: `make page`."""
