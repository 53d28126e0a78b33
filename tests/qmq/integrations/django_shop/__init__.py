"""An application of the test project."""
