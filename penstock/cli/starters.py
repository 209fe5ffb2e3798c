"""Holds the short configs that `penstock init` writes: one that runs as it is, and one for each kind of task."""

DEMO = """\
# A first run: a tiny built-in model learns to add. It runs as it is, offline, in minutes on a laptop:
#   penstock train THIS_FILE
# Put your own model, tasks and reward in their places. `penstock init --all` shows every key.
model:
  name: builtin                   # a Hugging Face name or a folder
tasks:
  source: builtin:arithmetic      # FILE.jsonl, datasets:NAME, reasoning_gym:NAME or file.py:function
  arguments: {split: train, size: 4000}
reward:
  functions: exact_match          # file.py:function, or a list of them
rollout:
  group_size: 8                   # answers to a task that are compared with each other
  groups_per_step: 16             # tasks of a step
  max_new_tokens: 5
trainer:
  learning_rate: 4.0e-4           # 1e-6 for a model of billions of parameters
  max_grad_norm: 0.3
staleness:
  max_staleness: 4                # 0: generation waits for every step
run:
  name: first                     # its folder is runs/first
  steps: 100
eval:
  tasks: {source: "builtin:arithmetic", arguments: {split: heldout, size: 128}}
  every: 50
"""

JSONL = """\
# Tasks from a file: a plain prompt, and the answer that is right.
#   penstock train THIS_FILE
model:
  name: builtin                   # a Hugging Face name or a folder
tasks:
  source: train.jsonl             # lines such as {"prompt": "263+146=", "answer": "409"}
  prompt: prompt                  # the column with the prompt
reward:
  functions: exact_match          # compares with the column `answer`; or file.py:function
rollout:
  group_size: 8                   # answers to a task that are compared with each other
  groups_per_step: 16             # tasks of a step
  max_new_tokens: 32
trainer:
  learning_rate: 4.0e-4           # 1e-6 for a model of billions of parameters
  max_grad_norm: 0.3
staleness:
  max_staleness: 4                # 0: generation waits for every step
run:
  name: jsonl
  steps: 100
  checkpoint_every: 50            # where `penstock resume jsonl` continues
eval:
  tasks: {source: heldout.jsonl}  # other tasks than those that are trained on
  every: 50
"""

CHAT = """\
# A chat model that answers questions, with a reward of your own.
#   penstock train THIS_FILE
model:
  name: Qwen/Qwen2.5-0.5B-Instruct
tasks:
  source: train.jsonl             # lines such as {"question": "…", "answer": "…"}
  prompt: question                # the column with the prompt: a text, or a list of messages
  as_chat: true
  system: Think briefly, then give the answer alone on the last line.
reward:
  functions: rewards.py:correct   # def correct(task, completion): return 1.0 or 0.0; see task.columns["answer"]
rollout:
  group_size: 8                   # answers to a question that are compared with each other
  groups_per_step: 16             # questions of a step
  max_new_tokens: 512
trainer:
  learning_rate: 1.0e-6
  warmup_steps: 5
staleness:
  max_staleness: 2                # 0: generation waits for every step
run:
  name: chat
  steps: 200
  checkpoint_every: 50            # where `penstock resume chat` continues
"""

AGENT = """\
# An agent that calls tools through OpenAI's API. It learns from the reward that it returns.
#   penstock train THIS_FILE
model:
  name: builtin-tools             # tiny, and calls a calculator; or a Hugging Face name or a folder
tasks:
  source: builtin:arithmetic      # FILE.jsonl with a prompt and whatever your agent needs
  arguments: {split: train, size: 4000}
rollout:
  workflow: agent.py:episode      # async def episode(task, rollout): … return reward; or a command: python agent.py
  group_size: 8                   # attempts at a task that are compared with each other
  groups_per_step: 8              # tasks of a step
  max_new_tokens: 12              # of one turn
  max_turns: 4
  timeout_s: 300                  # of one attempt
reward:
  functions: episode              # what the agent returns
trainer:
  learning_rate: 1.0e-3           # 1e-6 for a model of billions of parameters
  max_grad_norm: 0.3
staleness:
  max_staleness: 2                # 0: generation waits for every step
run:
  name: agent
  steps: 60
"""

LORA = """\
# A LoRA adapter on a model that stays as it is: little memory, small checkpoints.
#   penstock train THIS_FILE
model:
  name: Qwen/Qwen2.5-7B-Instruct
  device: cuda
  lora:
    rank: 16
    alpha: 32
    targets: all-linear
tasks:
  source: train.jsonl             # lines such as {"prompt": "…", "answer": "…"}
  as_chat: true
reward:
  functions: rewards.py:correct   # def correct(task, completion): return 1.0 or 0.0; see task.columns["answer"]
rollout:
  group_size: 8                   # answers to a task that are compared with each other
  groups_per_step: 32             # tasks of a step
  max_new_tokens: 512
trainer:
  learning_rate: 1.0e-5           # ten times that of a whole model
  checkpointing: full
staleness:
  max_staleness: 2                # 0: generation waits for every step
run: {name: lora, steps: 200, checkpoint_every: 50}
"""

STARTERS = {"jsonl": JSONL, "chat": CHAT, "agent": AGENT, "lora": LORA}
"""By what `penstock init --like` takes."""
