"""The routes of each subject (`server/app.py`)."""
