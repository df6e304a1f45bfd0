package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

//go:embed clients/smtplib_send.py
var smtplibSend []byte

//go:embed clients/nodemailer_send.js
var nodemailerSend []byte

// script is a client that runs as a process for each mail.
type script struct {
	env  env
	kind string
}

func (s script) name() string { return s.kind }
func (s script) close() error { return nil }

func (s script) version() (string, error) {
	switch s.kind {
	case "smtplib":
		v, err := output("python3", "--version")
		return v + ", timeout " + clientTimeout.String(), err
	case "nodemailer", "nodemailer pool":
		v, err := output("node", "--version")
		if err != nil {
			return "", err
		}
		data, err := os.ReadFile(filepath.Join(s.env.module(), "package.json"))
		if err != nil {
			return "", fmt.Errorf("-nodemailer: %w", err)
		}
		var p struct{ Version string }
		err = json.Unmarshal(data, &p)
		return p.Version + " on node " + v + ", timeouts " + clientTimeout.String(), err
	case "swaks":
		v, err := output("swaks", "--version")
		v, _, _ = strings.Cut(v, "\n")
		return v + ", --timeout 2", err
	}
	_, err := exec.LookPath("smtp-source")
	if err != nil {
		return "", err
	}
	v, err := output("postconf", "-d", "-h", "mail_version")
	return "of Postfix " + v + ", -m 1", err
}

func (e env) module() string { return filepath.Join(e.nodemailer, "node_modules", "nodemailer") }

func output(name string, args ...string) (string, error) {
	b, err := exec.Command(name, args...).Output()
	return strings.TrimSpace(string(b)), err
}

func (s script) send(ctx context.Context, addr, to string, mail []byte) (said, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return said{}, err
	}
	file, err := s.env.file("mail.eml", mail)
	if err != nil {
		return said{}, err
	}
	switch s.kind {
	case "smtplib":
		prog, err := s.env.file("smtplib_send.py", smtplibSend)
		if err != nil {
			return said{}, err
		}
		return s.json(ctx, exec.CommandContext(ctx, "python3", prog, host, port, to, file))
	case "nodemailer", "nodemailer pool":
		prog, err := s.env.file("nodemailer_send.js", nodemailerSend)
		if err != nil {
			return said{}, err
		}
		args := []string{prog, host, port, to, file}
		if s.kind == "nodemailer pool" {
			args = append(args, "pool")
		}
		cmd := exec.CommandContext(ctx, "node", args...)
		cmd.Env = append(os.Environ(), "NODEMAILER="+s.env.module())
		return s.json(ctx, cmd)
	case "swaks":
		return exitStatus(ctx, exec.CommandContext(ctx, "swaks", "--server", addr, "--from", "a@example.com", "--to", to,
			"--ehlo", "swaks", "--timeout", strconv.Itoa(int(clientTimeout.Seconds())), "--data", "@"+file))
	}
	return exitStatus(ctx, exec.CommandContext(ctx, "smtp-source", "-m", "1", "-s", "1", "-f", "a@example.com", "-t", to, "-M", "smtp-source", "-F", file, addr))
}

// json reads what the client's script printed.
func (s script) json(ctx context.Context, cmd *exec.Cmd) (said, error) {
	b, err := cmd.Output()
	if ctx.Err() != nil {
		return said{text: "never returns"}, nil
	}
	if err != nil {
		return said{}, fmt.Errorf("%w: %s", err, stderr(err))
	}
	var r struct {
		OK   bool
		Code int
		Text string
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return said{}, fmt.Errorf("%q: %w", b, err)
	}
	return said{ok: r.OK, code: max(r.Code, 0), text: r.Text}, nil
}

func stderr(err error) string {
	var ee *exec.ExitError
	if errors.As(err, &ee) {
		return string(ee.Stderr)
	}
	return ""
}

// replyLine finds the last reply that the client printed as its reason:
// swaks marks unexpected ones with "<**", smtp-source quotes them.
var replyLine = regexp.MustCompile(`(?m)(?:<\*\*|<\*\* |: )\s*([45]\d\d)[ -]`)

// exitStatus takes the exit status for the client's word.
func exitStatus(ctx context.Context, cmd *exec.Cmd) (said, error) {
	b, err := cmd.CombinedOutput()
	var ee *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return said{text: "never returns"}, nil
	case err == nil:
		return said{ok: true}, nil
	case !errors.As(err, &ee):
		return said{}, err
	}
	if m := replyLine.FindAllStringSubmatch(string(b), -1); m != nil {
		code, err := strconv.Atoi(m[len(m)-1][1])
		return said{code: code}, err
	}
	return said{text: "exit " + strconv.Itoa(ee.ExitCode())}, nil
}
