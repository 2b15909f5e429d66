"""The command line. Nothing is imported here, so that `jaxpg --help` is instant."""
