"""`kvcli serve`, asked with the openai client: the second question finds most of its document read."""

import re
import subprocess
import sys

from openai import OpenAI

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
document = "The mill belongs to Mr. Brook, and Ada rents it. She fears the flood in spring. " * 20

command = [sys.executable, "-m", "kvcli", "serve", model, "--method", "kivi-4", "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+/v1", line)))
        client = OpenAI(base_url=url, api_key="none")
        for question in ("Who is the landlord?", "What does Ada fear?"):
            messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
            print(f"{question} {answer.choices[0].message.content.strip()}")
            usage = answer.usage
            print(f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens were not read again")
    finally:
        server.terminate()
