"""The Hugging Face Hub: listing a repository, verified and resumable downloads, headers over the network.

huggingface_hub's cache, tokens, environment variables, xet and offline mode are used unchanged. Since version 1 it
discards unfinished files, does not verify the hash of a plain download and does not check free disk space; this
package does all three.
"""
