"""What tests of kvstore, and of what is built on it, share."""
