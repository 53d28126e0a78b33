"""The migrations of `manage.py migrate`."""
