"""The command `octavo top`: watches a server by its metrics alone.

Looks follow each other and are compared; what they say becomes words, and words become a picture.
Needs no torch and nothing of `octavo`.
"""
