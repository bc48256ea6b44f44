// Graphile Worker with the settings of its own performance page: a local queue, batched completions, 24 jobs at a time.
import { answer, load, now, stamp, work } from "./talk.mjs";

const CHUNK = 10_000;
const [role, connectionString] = process.argv.slice(2);
const { Logger, makeWorkerUtils, run } = await load("graphile-worker");
const logger = new Logger(() => () => {});

if (role === "install") {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  await utils.release();
} else if (role === "send") {
  const utils = await makeWorkerUtils({ connectionString, logger });
  let jobs = [];
  await answer({
    make: async (count) => {
      jobs = Array.from({ length: count }, (_, n) => ({ identifier: "nothing", payload: { n } }));
    },
    enqueue: async () => {
      for (let start = 0; start < jobs.length; start += CHUNK) await utils.addJobs(jobs.slice(start, start + CHUNK));
    },
    send: async (count) => {
      for (let n = 0; n < count; n += 1) await utils.addJob("nothing", { n });
    },
    stamp: async () => {
      const called = now();
      await utils.addJob("stamp", {});
      return [called, now()];
    },
    left: () =>
      utils.withPgClient(async (client) => {
        const found = await client.query("SELECT FROM graphile_worker._private_jobs LIMIT 1");
        return found.rowCount;
      }),
  });
} else {
  await work(async (handled) => {
    const runner = await run({
      preset: {
        worker: {
          connectionString,
          logger,
          concurrentJobs: 24,
          maxPoolSize: 25,
          localQueue: { size: 500 },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
      noHandleSignals: true,
      crontab: "",
      taskList: {
        nothing: async () => {
          handled.count += 1;
        },
        stamp: async () => stamp(),
      },
    });
    await runner.promise;
  });
}
