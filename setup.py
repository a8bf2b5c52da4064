"""The one part of the build that pyproject.toml cannot say: the engine is a cffi module."""

from setuptools import setup

setup(cffi_modules=["engine/build_native.py:make_ffi"])
