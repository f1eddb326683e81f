"""Stages 4 and 5 once more, in torch and for a CPU: native, so that a laptop can time the lesson.

Each is the loop of the stage that has its number, line by line, on tiles of the same tensors. Read
stages/s04_triton_lite.py and stages/s05_triton_online.py beside them.
"""
