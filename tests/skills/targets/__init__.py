"""Foreign projects that the skills' scripts are tried on, and how the tests start the scripts."""
