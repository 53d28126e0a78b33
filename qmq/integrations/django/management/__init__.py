"""Found by Django: `manage.py` takes its commands from here."""
