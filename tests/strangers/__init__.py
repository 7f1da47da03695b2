"""Models of public packages, unedited, under every strategy, against one device: `make test-strangers`."""
