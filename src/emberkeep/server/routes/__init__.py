"""The routes of each subject (`server/subjects.py`)."""
