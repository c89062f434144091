"""Support for trainers of other libraries.

Each module serves one library and imports it only when the module's classes are used.
"""
