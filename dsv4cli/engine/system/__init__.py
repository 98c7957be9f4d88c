"""What has this machine: its devices, memory, files, threads and signals?"""
