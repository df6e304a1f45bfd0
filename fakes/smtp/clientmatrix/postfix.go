package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// postfix relays to the fake from an instance of its own, a fresh one for each
// mail, so that no earlier mail waits in its queue: its configuration, queue and
// log lie in the temporary folder, it listens on no port, and it is stopped by
// its own command. It needs root.
type postfix struct {
	env  env
	root string // of the running instance
	conf string
	log  string
}

func (p *postfix) name() string { return "Postfix" }

func (p *postfix) version() (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("it needs root")
	}
	v, err := output("postconf", "-d", "-h", "mail_version")
	return v + " as a relay, its timeouts 2 s, deferred mail flushed at once", err
}

const mainCF = `compatibility_level = 3.6
queue_directory = %[1]s/spool
data_directory = %[1]s/data
maillog_file = %[1]s/maillog
maillog_file_prefixes = %[1]s
alternate_config_directories = %[1]s/conf
myhostname = postfix.test
mydestination =
inet_interfaces = loopback-only
inet_protocols = ipv4
smtp_host_lookup = native
notify_classes =
queue_run_delay = 1s
minimal_backoff_time = 1s
maximal_backoff_time = 1s
smtp_connection_cache_on_demand = no
smtp_tls_security_level = none
smtp_connect_timeout = 2s
smtp_helo_timeout = 2s
smtp_mail_timeout = 2s
smtp_rcpt_timeout = 2s
smtp_data_init_timeout = 2s
smtp_data_xfer_timeout = 2s
smtp_data_done_timeout = 2s
smtp_quit_timeout = 2s
relayhost =
transport_maps = static:smtp:[127.0.0.1]:%[2]s
`

// masterCF is Postfix' own list without anything that listens on a port.
const masterCF = `pickup unix n - n 1 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
verify unix - - n - 1 verify
flush unix n - n 1000? 0 flush
proxymap unix - - n - - proxymap
proxywrite unix - - n - 1 proxymap
smtp unix - - n - - smtp
relay unix - - n - - smtp
showq unix n - n - - showq
error unix - - n - - error
retry unix - - n - - error
discard unix - - n - - discard
local unix - n n - - local
virtual unix - n n - - virtual
lmtp unix - - n - - lmtp
anvil unix - - n - 1 anvil
scache unix - - n - 1 scache
postlog unix-dgram n - n - 1 postlogd
`

func (p *postfix) configure(port string) error {
	p.root = filepath.Join(p.env.dir, "postfix-"+port)
	p.conf, p.log = filepath.Join(p.root, "conf"), filepath.Join(p.root, "maillog")
	for _, d := range []string{p.conf, filepath.Join(p.root, "spool"), filepath.Join(p.root, "data")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(p.env.dir, 0o755); err != nil { // its daemons run as another user
		return err
	}
	if err := exec.Command("chown", "postfix", filepath.Join(p.root, "data")).Run(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(p.conf, "main.cf"), fmt.Appendf(nil, mainCF, p.root, port), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(p.conf, "master.cf"), []byte(masterCF), 0o644)
}

func (p *postfix) control(verb string) error {
	b, err := exec.Command("postfix", "-c", p.conf, verb).CombinedOutput()
	if err != nil {
		return fmt.Errorf("postfix %s: %w: %s", verb, err, b)
	}
	return nil
}

// statusLine is Postfix' own word on a recipient.
var statusLine = regexp.MustCompile(`to=<([^>]*)>.* dsn=(\S+), status=(\w+) \((.*)\)`)

// remoteReply is a reply that Postfix quotes in its reason.
var remoteReply = regexp.MustCompile(`said: (\d\d\d)|^(\d\d\d) `)

func (p *postfix) send(ctx context.Context, addr, to string, mail []byte) (said, error) {
	_, port, _ := strings.Cut(addr, ":")
	if err := p.configure(port); err != nil {
		return said{}, err
	}
	if err := p.control("start"); err != nil {
		return said{}, err
	}
	got, err := p.relay(ctx, to, mail)
	return got, errors.Join(err, p.control("stop"))
}

func (p *postfix) relay(ctx context.Context, to string, mail []byte) (said, error) {
	inject := exec.CommandContext(ctx, "sendmail", "-C", p.conf, "-i", "-f", "<>", to)
	inject.Stdin = strings.NewReader(strings.ReplaceAll(string(mail), "\r\n", "\n"))
	if b, err := inject.CombinedOutput(); err != nil {
		return said{}, fmt.Errorf("sendmail: %w: %s", err, b)
	}
	return p.watch(ctx, to)
}

// watch follows the log until Postfix is done with the recipient and returns
// its first word on it; what it does afterwards by itself shows in the ledger.
func (p *postfix) watch(ctx context.Context, to string) (said, error) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	var words []said
	for {
		data, err := os.ReadFile(p.log)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return said{}, err
		}
		words = words[:0]
		done := false
		for _, m := range statusLine.FindAllStringSubmatch(string(data), -1) {
			if m[1] != to {
				continue
			}
			words = append(words, word(m[3], m[4]))
			done = done || m[3] != "deferred"
		}
		if done {
			return words[0], nil
		}
		if len(words) > 0 { // deferred: do not wait for the queue run
			if b, err := exec.CommandContext(ctx, "postqueue", "-c", p.conf, "-f").CombinedOutput(); err != nil && ctx.Err() == nil {
				return said{}, fmt.Errorf("postqueue: %w: %s", err, b)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if len(words) > 0 {
				return words[0], nil
			}
			return said{text: "no word in the log"}, nil
		}
	}
}

func word(status, reason string) said {
	if status == "sent" {
		return said{ok: true}
	}
	if m := remoteReply.FindStringSubmatch(reason); m != nil {
		code, err := strconv.Atoi(m[1] + m[2])
		if err == nil {
			return said{code: code}
		}
	}
	text := status
	if strings.Contains(reason, "more than once") {
		text += " (\"may be sent more than once\")"
	}
	return said{text: text}
}

func (p *postfix) close() error { return nil } // each send stops its own
