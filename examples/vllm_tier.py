"""vLLM with a tier of codes on disk: run it twice, and the second run finds the document that the first one read."""

import json
import shlex
import sys

from kvcli.integrations.chunks.served import Served, StoreSettings

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
codes = {"folder": "chunks", "max_bytes": "20GiB", "method": "kivi-2"}
Served.load(StoreSettings.read({"model": model, **codes}))  # says now what vLLM would say after its start
tier = {"type": "KvcliTier", "module_path": "kvcli.integrations.vllm.tier", **codes}
extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 2**30, "block_size": 512, "secondary_tiers": [tier]}
transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

if __name__ == "__main__":
    print(shlex.join(["vllm", "serve", model, "--kv-transfer-config", json.dumps(transfer)]))  # the same as a server
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        sys.exit("vLLM is not installed: pip install 'kvcli[vllm]' 'vllm>=0.32'")
    llm, sampling = LLM(model, kv_transfer_config=transfer), SamplingParams(max_tokens=32, temperature=0)
    document = "The mill belongs to Mr. Brook, and Ada rents it. She fears the flood in spring. " * 60
    for question in ("Who is the landlord?", "What does Ada fear?"):
        (answer,) = llm.generate([f"{document}\n\n{question}"], sampling)
        print(f"{question} {answer.outputs[0].text.strip()}")
        print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens were not read again")
