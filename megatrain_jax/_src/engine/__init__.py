"""Trains any model: cuts its loss into stages and streams their state through the device."""
