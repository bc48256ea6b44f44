// pg-boss with what its documentation has for speed: insert in bulk, large batches fetched in bursts, LISTEN and NOTIFY.
import { answer, load, now, stamp, work } from "./talk.mjs";

const CHUNK = 10_000;
const BATCH = 1_000;
const [role, connectionString] = process.argv.slice(2);
const { PgBoss } = await load("pg-boss");
const boss = new PgBoss({ connectionString, schedule: false, useListenNotify: true });
boss.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
await boss.start();

if (role === "install") {
  for (const queue of ["nothing", "stamp"]) await boss.createQueue(queue, { notify: true });
  await boss.stop({ graceful: false });
  process.exit(0);
} else if (role === "send") {
  let jobs = [];
  await answer({
    make: async (count) => {
      jobs = Array.from({ length: count }, (_, n) => ({ data: { n } }));
    },
    enqueue: async () => {
      for (let start = 0; start < jobs.length; start += CHUNK) {
        await boss.insert("nothing", jobs.slice(start, start + CHUNK));
      }
    },
    send: async (count) => {
      for (let n = 0; n < count; n += 1) await boss.send("nothing", { n });
    },
    stamp: async () => {
      const called = now();
      await boss.send("stamp", {});
      return [called, now()];
    },
    left: async () => {
      const found = await boss.getDb().executeSql("SELECT 1 FROM pgboss.job WHERE state < 'completed' LIMIT 1");
      return found.rows.length;
    },
  });
} else {
  await work(async (handled) => {
    const options = { batchSize: BATCH, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
    await boss.work("nothing", options, async (jobs) => {
      handled.count += jobs.length;
    });
    await boss.work("stamp", { ...options, batchSize: 1 }, async () => stamp());
  });
}
