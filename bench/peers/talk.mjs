// talk.py for Node: words in, lines of JSON out. It runs in the folder that npm filled for the peer.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const SAY_EVERY = 10;

export const load = (name) => import(createRequire(`${process.cwd()}/`).resolve(name));

export const say = (fact) => process.stdout.write(`${JSON.stringify(fact)}\n`);

// The clock that Python calls monotonic, in seconds.
export const now = () => Number(process.hrtime.bigint()) / 1e9;

export const stamp = () => say({ stamp: now() });

export async function answer(verbs) {
  say({ ready: 1 });
  for await (const line of createInterface({ input: process.stdin })) {
    const [verb, count] = line.trim().split(" ");
    say({ answer: (await verbs[verb](Number(count ?? 0))) ?? null });
  }
  process.exit(0);
}

export async function work(run) {
  const handled = { count: 0 };
  let said = 0;
  say({ ready: 1 });
  let running = false;
  for await (const _ of createInterface({ input: process.stdin })) {
    if (running) continue;
    running = true;
    setInterval(() => {
      if (handled.count !== said) say({ done: (said = handled.count) });
    }, SAY_EVERY);
    run(handled).catch((error) => {
      console.error(error);
      process.exit(1);
    });
  }
  process.exit(0);
}
