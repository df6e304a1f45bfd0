// Package demo is the picture that explains the project, within 20 seconds and
// without any infrastructure: three senders hand the same bookings to three
// equal servers that refuse some mails, crash before storing some, and store
// some but lose the 250.
//
// It imports nothing of this module but the packages of fakes/.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	netsmtp "net/smtp"
	"strings"
	"sync"
	"time"

	gosmtp "github.com/emersion/go-smtp"
	"golang.org/x/time/rate"

	"mailproof/fakes/judge"
	"mailproof/fakes/smtp"
)

// Options of a demonstration.
type Options struct {
	Seed  uint64
	Mails int // default 240
	// PerSecond paces each sender, so that there is something to watch;
	// default 60.
	PerSecond int
	// Live redraws the picture in place; else only the end is printed.
	Live bool
}

// Result is one sender's end.
type Result struct {
	Sender string
	Report judge.Report
}

// sender hands over one mail, with as many tries as it sees fit.
type sender struct {
	name, rule string
	send       func(ctx context.Context, srv *smtp.Server, key string) error
}

var senders = []sender{
	{"naive", "any error: try again", naive},
	{"timid", "any error: give up", timid},
	{"careful", "no answer: ask the server's log first", careful},
}

// Run shows the picture and returns what became of each sender's mails.
func Run(ctx context.Context, out io.Writer, opt Options) ([]Result, error) {
	if opt.Mails == 0 {
		opt.Mails = 240
	}
	if opt.PerSecond == 0 {
		opt.PerSecond = 60
	}
	fmt.Fprintf(out, "%d bookings, three senders, three equal servers (seed %d). Each server\n"+
		"refuses 15%% of the tries with 451, crashes before it stores 5%%, and stores 15%%\nbut loses the 250.\n\n", opt.Mails, opt.Seed)
	lanes, err := open(opt)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, l := range lanes {
			_ = l.srv.Close()
		}
	}()
	if err := race(ctx, out, lanes, opt); err != nil {
		return nil, err
	}
	return conclude(out, lanes, opt)
}

type lane struct {
	sender
	srv  *smtp.Server
	mu   sync.Mutex
	done int
}

func open(opt Options) ([]*lane, error) {
	var lanes []*lane
	for _, s := range senders {
		srv, err := smtp.Start(smtp.Options{Seed: opt.Seed, Rules: []smtp.Rule{
			smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).Chance(0.15).ID("refuse").Rule(),
			smtp.On(smtp.StageDot, smtp.Drop).Chance(0.05).ID("crash-before-the-store").Rule(),
			smtp.On(smtp.StageStored, smtp.Drop).Chance(0.15).ID("lose-the-250").Rule(),
		}})
		if err != nil {
			return lanes, err
		}
		lanes = append(lanes, &lane{sender: s, srv: srv})
	}
	return lanes, nil
}

func key(i int) string { return fmt.Sprintf("ticket:%04d", i) }

func race(ctx context.Context, out io.Writer, lanes []*lane, opt Options) error {
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() {
			pace := rate.NewLimiter(rate.Limit(opt.PerSecond), 1)
			for i := range opt.Mails {
				if pace.Wait(ctx) != nil {
					return
				}
				_ = l.send(ctx, l.srv, key(i)) // what the sender believes is not evidence
				l.mu.Lock()
				l.done = i + 1
				l.mu.Unlock()
			}
		})
	}
	finished := make(chan struct{})
	go func() { wg.Wait(); close(finished) }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-finished:
			draw(out, lanes, opt)
			return context.Cause(ctx)
		case <-tick.C:
			draw(out, lanes, opt)
			if opt.Live {
				fmt.Fprintf(out, "\x1b[%dA", len(lanes))
			}
		}
	}
}

const width = 28

// draw prints a bar for each sender.
func draw(out io.Writer, lanes []*lane, opt Options) {
	if !opt.Live {
		return
	}
	for _, l := range lanes {
		l.mu.Lock()
		done := l.done
		l.mu.Unlock()
		n := done * width / opt.Mails
		t := l.srv.Totals()
		fmt.Fprintf(out, "\r\x1b[K%-8s %s%s %4d/%d  tries %4d  stored %4d  doubled \x1b[31m%d\x1b[0m\n", l.name,
			strings.Repeat("█", n), strings.Repeat("░", width-n), done, opt.Mails, t.Rows+t.Open, t.Stored, t.Doubled)
	}
}

func conclude(out io.Writer, lanes []*lane, opt Options) ([]Result, error) {
	keys := make([]string, opt.Mails)
	for i := range keys {
		keys[i] = key(i)
	}
	var results []Result
	fmt.Fprintf(out, "\n%-8s  %-38s  %5s  %5s  %7s\n", "sender", "what it does", "once", "lost", "doubled")
	for _, l := range lanes {
		r, err := judge.Judge(keys, l.srv.Ledger(), judge.Key)
		if err != nil {
			return results, err
		}
		fmt.Fprintf(out, "%-8s  %-38s  %5d  %5d  %7d\n", l.name, l.rule, r.Once, len(r.Lost), len(r.Doubled))
		results = append(results, Result{l.name, r})
	}
	story(out, results)
	fmt.Fprint(out, "\nNo answer after the final dot means: only the server knows. A sender that guesses\n"+
		"loses or doubles; one that keeps one key per mail and asks does neither.\n")
	return results, nil
}

// story tells one doubled mail.
func story(out io.Writer, results []Result) {
	for _, r := range results {
		if len(r.Report.Doubled) == 0 {
			continue
		}
		m := r.Report.Doubled[0]
		fmt.Fprintf(out, "\n%s was delivered %d times by the %s sender:\n", m.Name, m.Copies, r.Sender)
		for i, a := range m.Story {
			kept, told := "not stored", "told nothing"
			if a.Stored {
				kept = "stored"
			}
			if a.ReplyWritten {
				told = fmt.Sprintf("told %d", a.Code)
			}
			fmt.Fprintf(out, "  try %d  %-10s  %s\n", i+1, kept, told)
		}
		return
	}
}

const (
	from     = "shop@example.com"
	maxTries = 8
)

func mail(key string) string {
	return "From: " + from + "\r\nTo: " + to(key) + "\r\nSubject: Your ticket\r\nMessage-ID: <" + key + "@example.com>\r\nX-Dedupe-Key: " + key +
		"\r\n\r\nHere is your ticket.\r\n"
}

func to(key string) string { return strings.ReplaceAll(key, ":", "-") + "@example.com" }

// naive takes every error for "not sent".
func naive(ctx context.Context, srv *smtp.Server, key string) error {
	var err error
	for range maxTries {
		if err = timid(ctx, srv, key); err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// timid tries once.
func timid(_ context.Context, srv *smtp.Server, key string) error {
	return netsmtp.SendMail(srv.Addr(), nil, from, []string{to(key)}, []byte(mail(key)))
}

// careful tells apart what it knows: refused is tried again, accepted is
// accepted whatever QUIT says, and no answer after the dot is looked up in the
// server's log before anything else is done.
func careful(ctx context.Context, srv *smtp.Server, key string) error {
	var err error
	for range maxTries {
		var dot bool
		if dot, err = once(srv, key); err == nil || ctx.Err() != nil {
			return err
		}
		var refused *gosmtp.SMTPError
		if !dot || errors.As(err, &refused) {
			continue // certainly not accepted
		}
		if v := srv.Verdict(key); v.Copies > 0 {
			return nil
		} else if !v.ProvenAbsent {
			return fmt.Errorf("%s: unknown, left for a person", key)
		}
	}
	return err
}

// once tries once and says whether the final dot may have been sent.
func once(srv *smtp.Server, key string) (dot bool, err error) {
	c, err := gosmtp.Dial(srv.Addr())
	if err != nil {
		return false, err
	}
	defer c.Close()
	if err := c.Mail(from, nil); err != nil {
		return false, err
	}
	if err := c.Rcpt(to(key), nil); err != nil {
		return false, err
	}
	w, err := c.Data()
	if err != nil {
		return false, err
	}
	if _, err := io.WriteString(w, mail(key)); err != nil {
		return false, err
	}
	if err := w.Close(); err != nil {
		return true, err
	}
	_ = c.Quit() // the mail is theirs, whatever becomes of QUIT
	return true, nil
}
