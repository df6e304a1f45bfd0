package main

import (
	"context"
	"errors"
	"io"
	"net"
	netsmtp "net/smtp"
	"net/textproto"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	gosmtp "github.com/emersion/go-smtp"
	gomail "github.com/wneessen/go-mail"
)

// short names an error without its addresses, which differ from run to run.
func short(err error) string {
	var ne net.Error
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "EOF"
	case errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.Is(err, syscall.EPIPE):
		return "broken pipe"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &ne) && ne.Timeout():
		return "timeout"
	}
	return "no valid reply"
}

func fromError(err error) said {
	if err == nil {
		return said{ok: true}
	}
	var se *gosmtp.SMTPError
	if errors.As(err, &se) {
		return said{code: se.Code}
	}
	var te *textproto.Error
	if errors.As(err, &te) {
		return said{code: te.Code}
	}
	return said{text: short(err)}
}

type netSMTP struct{}

func (netSMTP) name() string             { return "net/smtp" }
func (netSMTP) version() (string, error) { return runtime.Version() + ", smtp.SendMail", nil }
func (netSMTP) close() error             { return nil }

func (netSMTP) send(ctx context.Context, addr, to string, mail []byte) (said, error) {
	done := make(chan error, 1)
	go func() { done <- netsmtp.SendMail(addr, nil, "a@example.com", []string{to}, mail) }()
	select {
	case err := <-done:
		return fromError(err), nil
	case <-ctx.Done():
		return said{text: "never returns"}, nil // the server's close ends it
	}
}

type goSMTP struct{}

func (goSMTP) name() string { return "go-smtp" }
func (goSMTP) version() (string, error) {
	return "v0.26.0, SendMail and Quit, both timeouts " + clientTimeout.String(), nil
}
func (goSMTP) close() error { return nil }

func (goSMTP) send(_ context.Context, addr, to string, mail []byte) (said, error) {
	c, err := gosmtp.Dial(addr)
	if err != nil {
		return fromError(err), nil
	}
	defer c.Close()
	c.CommandTimeout, c.SubmissionTimeout = clientTimeout, clientTimeout
	if err := c.SendMail("a@example.com", []string{to}, strings.NewReader(string(mail))); err != nil {
		return fromError(err), nil
	}
	return fromError(c.Quit()), nil
}

type goMail struct{}

func (goMail) name() string { return "go-mail" }
func (goMail) version() (string, error) {
	return "v0.8.1, DialAndSend, timeout " + clientTimeout.String(), nil
}
func (goMail) close() error { return nil }

func (goMail) send(ctx context.Context, addr, to string, mail []byte) (said, error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return said{}, err
	}
	port, err := strconv.Atoi(p)
	if err != nil {
		return said{}, err
	}
	c, err := gomail.NewClient(host, gomail.WithPort(port), gomail.WithTLSPolicy(gomail.NoTLS), gomail.WithTimeout(clientTimeout), gomail.WithHELO("go-mail"))
	if err != nil {
		return said{}, err
	}
	m := gomail.NewMsg()
	if err := errors.Join(m.From("a@example.com"), m.To(to)); err != nil {
		return said{}, err
	}
	key, _, _ := strings.Cut(to, "@")
	m.Subject("matrix")
	m.SetMessageIDWithValue(key + "@example.com")
	m.SetGenHeader("X-Dedupe-Key", key)
	m.SetBodyString(gomail.TypeTextPlain, string(mail))
	err = c.DialAndSendWithContext(ctx, m)
	var se *gomail.SendError
	if errors.As(err, &se) && se.ErrorCode() != 0 {
		return said{code: se.ErrorCode()}, nil
	}
	return fromError(err), nil
}
