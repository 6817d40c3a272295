"""Measuring: what a step keeps, sends and takes."""
