"""Evaluation: score a model on a set of questions, and compare two models."""
