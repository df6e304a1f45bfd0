// Sends one mail with nodemailer and prints what it reported as JSON.
'use strict';
const fs = require('fs');
const nodemailer = require(process.env.NODEMAILER || 'nodemailer');
const [host, port, to, path, pool] = process.argv.slice(2);
const t = nodemailer.createTransport({
  host, port: Number(port), name: 'nodemailer', ignoreTLS: true, pool: pool === 'pool',
  connectionTimeout: 2000, greetingTimeout: 2000, socketTimeout: 2000,
});
t.sendMail({ envelope: { from: 'a@example.com', to: [to] }, raw: fs.readFileSync(path) })
  .then(() => ({ ok: true }), e => ({ ok: false, code: e.responseCode || 0, text: e.code || e.message }))
  .then(r => { console.log(JSON.stringify(r)); t.close(); });
