"""The dispatcher: which groups enter the loop, and when."""
