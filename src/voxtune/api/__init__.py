"""The functions of the Python API that stand for a whole command: `voxtune.train`, `voxtune.evaluate`, `voxtune.view`."""
