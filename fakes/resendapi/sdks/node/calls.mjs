// Makes calls with Resend's official SDK for Node: one JSON object a line in,
// what the SDK returned out. The test in ../.. drives it.
import readline from 'node:readline';
import { Resend } from 'resend';

const email = m => {
  const { scheduled_at: scheduledAt, reply_to: replyTo, ...rest } = m;
  if (scheduledAt) rest.scheduledAt = scheduledAt;
  if (replyTo) rest.replyTo = replyTo;
  return rest;
};

async function make(c) {
  const resend = new Resend(c.api_key, { baseUrl: c.base });
  const options = c.key ? { idempotencyKey: c.key } : {};
  switch (c.call) {
    case 'emails.send': return resend.emails.send(email(c.args), options);
    case 'batch.send': return resend.batch.send(c.args.map(email), c.validation ? { ...options, batchValidation: c.validation } : options);
    case 'emails.get': return resend.emails.get(c.id);
    case 'emails.list': return resend.emails.list(c.args);
    case 'emails.update': return resend.emails.update({ id: c.id, scheduledAt: c.args.scheduled_at });
    case 'emails.cancel': return resend.emails.cancel(c.id);
    case 'webhooks.create': return resend.webhooks.create(c.args);
    case 'webhooks.get': return resend.webhooks.get(c.id);
    case 'webhooks.list': return resend.webhooks.list(c.args);
    case 'webhooks.update': return resend.webhooks.update(c.id, c.args);
    case 'webhooks.remove': return resend.webhooks.remove(c.id);
    case 'webhooks.verify': {
      const { payload, id, timestamp, signature, secret } = c.args;
      try {
        resend.webhooks.verify({ payload, headers: { id, timestamp, signature }, webhookSecret: secret });
        return { data: { verified: true } };
      } catch (e) {
        return { error: { message: e.message } };
      }
    }
  }
  throw new Error('unknown call ' + c.call);
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { data, error } = await make(JSON.parse(line));
  console.log(JSON.stringify({ data: data ?? undefined, error: error ?? undefined }));
}
