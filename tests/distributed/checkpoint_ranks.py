"""Entry of the ranks of the checkpoint tests: python -m tests.distributed.checkpoint_ranks STEPS.json.

Megatron-Core's save starts a process that imports the main module again; this one is quick to import.
"""

if __name__ == "__main__":
    from tests.distributed.checkpoint_steps import main

    main()
