"""Measuring the product from outside: real servers, real disks, ratios taken side by side in one run."""
