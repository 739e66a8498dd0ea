"""Bytes at rest: frames of records in files and objects, and how records are compressed."""
