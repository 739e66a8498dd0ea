"""`kvstore bench codec`: what coding records gains and costs."""
