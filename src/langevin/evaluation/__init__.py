"""How good a trained model is: likelihood, calibration, and where its attention goes."""
