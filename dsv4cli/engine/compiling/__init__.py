"""Which kernels will a run launch, and are they compiled before it does?"""
