"""The native CPU path: C++ behind a plain C interface, compiled on first use, called by ctypes."""
