"""`kvstore bench events`: what announcing costs, and how true an index of it is."""
