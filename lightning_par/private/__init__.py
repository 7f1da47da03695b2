"""Every use of a private name of Lightning or torch, each with the reason why no public one does.

``tests/private`` has a file for each part, which fails, naming the name, when one of them moves.

    checkpoints: what is written into checkpoint files, and read from them
    compiler: what ``torch.compile`` made
    graph: autograd's graph: its nodes, and the backward that runs
    launchers: what starts the processes of the ranks
    leaf_hooks: hooks on the gradient of a leaf
    loaders: where Lightning keeps loaders and the batches that it fetched
    modes: modes, which see each torch function or each operation
    module_calls: what the call of a module runs
    module_hooks: hooks on the calls of modules and on the gradients there
    modules: what modules keep of their weights and buffers
    optimizers: what an optimizer and a gradient scaler keep to themselves
    process_groups: how ranks are connected, and what their connection says
    storage: the memory of tensors
    trainer: what a Trainer and its callbacks keep to themselves
    transforms: torch's transforms of functions, such as ``vmap``
"""
