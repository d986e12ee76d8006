"""The Python-backend model of the Triton server; the only package that talks to it."""
