"""A conversation that is saved with its compressed cache and resumed, as another process or another day would."""

import sys

import kvcli
from kvcli.text.chat import Conversation

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
loaded = kvcli.load_model(model)
sampling = kvcli.SamplingConfig(max_new_tokens=32)

with kvcli.attach(loaded, "kivi-4") as session:
    talk = Conversation(loaded, session, sampling)
    print("reply:", talk.reply("Name three fruits.").text.strip())
    print(f"saved {talk.context().save('talk.safetensors')} bytes")

with kvcli.attach(loaded, "kivi-4") as session:
    talk = Conversation(loaded, session, sampling)
    talk.resume(kvcli.Context.load("talk.safetensors"))
    reply = talk.reply("Name two more.")
    print("resumed:", reply.text.strip())
    print(f"{reply.reused_tokens} of {reply.prompt_tokens} prompt tokens were not read again")
    print(f"{len(talk.messages)} messages")
