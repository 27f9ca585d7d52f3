"""The scalar format: asymmetric scalar quantization with 16-bit scale and zero. KIVI, SQuat, RTN, and QJL's values."""
