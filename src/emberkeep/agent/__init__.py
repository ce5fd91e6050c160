"""Turns in which a model acts: it calls tools, they run, it goes on."""
