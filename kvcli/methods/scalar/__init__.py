"""The scalar format: asymmetric scalar quantization with 16-bit scale and zero. KIVI, SQuat, RTN, and QJL's values.

Reference: affine, per_token, per_channel. Kernels: encode, decode, and attend (score, rotated_score, value).
"""
