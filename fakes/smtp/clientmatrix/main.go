// Command clientmatrix hands one mail after the other to the fake server with
// real clients, one fault each, and writes a table of what each client said
// beside what the ledger knows: which clients call a delivered mail failed,
// which call a lost one delivered, which send again by themselves.
//
//	go run ./fakes/smtp/clientmatrix -nodemailer DIR -out docs/fakes-smtp-clients.md
//
// It needs python3, node with nodemailer, swaks and postfix (for smtp-source
// and for Postfix itself, which it runs from its own configuration on no
// listening port). A client that is missing is an error; -only names the ones
// to run instead of all.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mailproof/fakes/smtp"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "clientmatrix:", err)
		os.Exit(1)
	}
}

func run() error {
	out := flag.String("out", "", "file to write, default standard output")
	only := flag.String("only", "", "comma-separated clients, default all")
	node := flag.String("nodemailer", "", "folder that holds node_modules/nodemailer")
	flag.Parse()
	dir, err := os.MkdirTemp("", "clientmatrix-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	clients, err := choose(env{dir: dir, nodemailer: *node}, *only)
	if err != nil {
		return err
	}
	table, err := fill(context.Background(), clients)
	if err != nil {
		return err
	}
	text := table.markdown()
	if *out == "" {
		_, err = os.Stdout.WriteString(text)
		return err
	}
	return os.WriteFile(*out, []byte(text), 0o644)
}

// said is what a client reported to its caller.
type said struct {
	ok   bool
	code int    // reply code that it passed on, 0 for none
	text string // short
}

func (s said) String() string {
	switch {
	case s.ok:
		return "sent"
	case s.code != 0:
		return fmt.Sprintf("failed %d", s.code)
	}
	return "failed: " + s.text
}

// client hands over one mail.
type client interface {
	name() string
	// version also says whether the client is there.
	version() (string, error)
	send(ctx context.Context, addr, to string, mail []byte) (said, error)
	close() error
}

func choose(e env, only string) ([]client, error) {
	all := []client{
		netSMTP{},
		goSMTP{},
		goMail{},
		script{e, "smtplib"},
		script{e, "nodemailer"},
		script{e, "nodemailer pool"},
		script{e, "swaks"},
		script{e, "smtp-source"},
		&postfix{env: e},
	}
	var chosen []client
	for _, c := range all {
		if only == "" || contains(strings.Split(only, ","), c.name()) {
			chosen = append(chosen, c)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("-only %q names no client", only)
	}
	for _, c := range chosen {
		if _, err := c.version(); err != nil {
			return nil, fmt.Errorf("%s is missing: %w", c.name(), err)
		}
	}
	return chosen, nil
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if strings.TrimSpace(x) == s {
			return true
		}
	}
	return false
}

// fault is one row of the table. It strikes once: a client that tries again
// meets a server that behaves.
type fault struct {
	name string
	rule smtp.Builder
	none bool
}

// clientTimeout is what clients are told where they can be; a hang outlasts
// it.
const clientTimeout = 2 * time.Second

var faults = []fault{
	{name: "none", none: true},
	{name: "closed before the greeting", rule: smtp.On(smtp.StageConnect, smtp.Drop)},
	{name: "greeted with 554", rule: smtp.On(smtp.StageConnect, smtp.Reply).Code(554)},
	{name: "closed at EHLO", rule: smtp.On(smtp.StageEHLO, smtp.Drop)},
	{name: "451 to MAIL", rule: smtp.On(smtp.StageMail, smtp.Reply).Code(451)},
	{name: "451 to RCPT", rule: smtp.On(smtp.StageRcpt, smtp.Reply).Code(451)},
	{name: "550 to RCPT", rule: smtp.On(smtp.StageRcpt, smtp.Reply).Code(550)},
	{name: "451 to DATA", rule: smtp.On(smtp.StageData, smtp.Reply).Code(451)},
	{name: "closed inside the body", rule: smtp.On(smtp.StageBody, smtp.Drop)},
	{name: "451 to the dot", rule: smtp.On(smtp.StageDot, smtp.Reply).Code(451)},
	{name: "554 to the dot", rule: smtp.On(smtp.StageDot, smtp.Reply).Code(554)},
	{name: "closed after the dot, not stored", rule: smtp.On(smtp.StageDot, smtp.Drop)},
	{name: "stored, closed without the 250", rule: smtp.On(smtp.StageStored, smtp.Drop)},
	{name: "stored, reset without the 250", rule: smtp.On(smtp.StageStored, smtp.Reset)},
	{name: "stored, no 250 until the client gives up", rule: smtp.On(smtp.StageStored, smtp.Hang).For(3 * clientTimeout)},
	{name: "stored, 250 cut in its text", rule: smtp.On(smtp.StageStored, smtp.Cut).Bytes(9)},
	{name: "stored, garbage for the 250", rule: smtp.On(smtp.StageStored, smtp.Garbage)},
	{name: "stored, 451 (lie)", rule: smtp.On(smtp.StageStored, smtp.Reply).Code(451)},
	{name: "not stored, 250 (lie)", rule: smtp.On(smtp.StageDot, smtp.Reply).Code(250)},
	{name: "stored, 250, then closed", rule: smtp.On(smtp.StageReplied, smtp.Drop)},
	{name: "stored, 250, closed at QUIT", rule: smtp.On(smtp.StageQuit, smtp.Drop)},
	{name: "stored, 250, garbage to QUIT", rule: smtp.On(smtp.StageQuit, smtp.Garbage)},
}

// cell is what one client did about one fault.
type cell struct {
	said   said
	copies int
	tries  int // rows of the ledger that name the recipient or none
	fired  bool
	// struckStored: the try that the fault struck left a copy.
	struckStored bool
}

type table struct {
	clients  []string
	versions []string
	cells    map[string]map[string]cell // fault, client
}

// sendTimeout bounds one send; net/smtp has no timeout of its own.
const sendTimeout = 30 * time.Second

func fill(ctx context.Context, clients []client) (*table, error) {
	t := &table{cells: map[string]map[string]cell{}}
	for _, c := range clients {
		v, err := c.version()
		if err != nil {
			return nil, err
		}
		t.clients, t.versions = append(t.clients, c.name()), append(t.versions, v)
		for i, f := range faults {
			got, err := one(ctx, c, f, i)
			if err != nil {
				return nil, errors.Join(fmt.Errorf("%s, %s: %w", c.name(), f.name, err), c.close())
			}
			if t.cells[f.name] == nil {
				t.cells[f.name] = map[string]cell{}
			}
			t.cells[f.name][c.name()] = got
			fmt.Fprintf(os.Stderr, "%-16s %-42s %-28s copies %d, tries %d\n", c.name(), f.name, got.said, got.copies, got.tries)
		}
		if err := c.close(); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func one(ctx context.Context, c client, f fault, i int) (cell, error) {
	opt := smtp.Options{}
	if !f.none {
		opt.Rules = []smtp.Rule{f.rule.Times(1).Rule()}
	}
	srv, err := smtp.Start(opt)
	if err != nil {
		return cell{}, err
	}
	key := fmt.Sprintf("m%d-%d", i, time.Now().UnixNano())
	to := key + "@example.com"
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	got, err := c.send(ctx, srv.Addr(), to, message(key, to))
	if err != nil {
		return cell{}, errors.Join(err, srv.Close())
	}
	if err := srv.Close(); err != nil {
		return cell{}, err
	}
	res := cell{said: got, copies: srv.Verdict(key).Copies, fired: f.none || srv.Rules()[0].Struck > 0}
	if rows := srv.Ledger(); len(rows) > 0 {
		res.struckStored = rows[0].Session == 1 && rows[0].Stored
	}
	for _, s := range srv.Sessions() {
		if s.Last != "" || s.Fault != "" {
			res.tries++
		}
	}
	if !res.fired {
		// QUIT is the one command that a client may leave out.
		res.said.text = "never got there"
	}
	return res, nil
}

func message(key, to string) []byte {
	return []byte("From: a@example.com\r\nTo: " + to + "\r\nSubject: matrix\r\nMessage-ID: <" + key +
		"@example.com>\r\nX-Dedupe-Key: " + key + "\r\n\r\nHello.\r\n")
}

func (t *table) markdown() string {
	var b strings.Builder
	b.WriteString("# What real clients make of each fault\n\n" +
		"Made by `make clients`; one mail for each cell, each fault strikes once.\n" +
		"A cell is what the client told its caller. **Bold**: it is wrong; the ledger says otherwise.\n" +
		"\"×2\": the recipient has two copies. \"n connections\": the client connected again by itself.\n" +
		"\"–\": the client never sends that command.\n\n")
	b.WriteString("| fault | stored |")
	for _, c := range t.clients {
		b.WriteString(" " + c + " |")
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", len(t.clients)) + "\n")
	for _, f := range faults {
		row := t.cells[f.name]
		b.WriteString("| " + f.name + " | " + f.stored() + " |")
		for _, c := range t.clients {
			b.WriteString(" " + row[c].markdown() + " |")
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nThe column \"stored\" is the ledger's word on the try that the fault struck.\n\n## Versions and settings\n\n")
	for i, c := range t.clients {
		fmt.Fprintf(&b, "- %s: %s\n", c, t.versions[i])
	}
	b.WriteString("\n" + t.summary())
	return b.String()
}

// stored says whether the struck try left a copy.
func (f fault) stored() string {
	if f.none || strings.HasPrefix(f.name, "stored") {
		return "yes"
	}
	return "no"
}

func (c cell) markdown() string {
	if !c.fired {
		return "–"
	}
	s := c.said.String()
	if c.wrong() {
		s = "**" + s + "**"
	}
	if c.copies > 1 {
		s += fmt.Sprintf(" ×%d", c.copies)
	}
	if c.tries > 1 {
		s += fmt.Sprintf(", %d connections", c.tries)
	}
	return s
}

// wrong: the caller was told the opposite of what the ledger knows. A word of
// failure is about the try that was struck, a word of success about the end.
func (c cell) wrong() bool {
	if c.said.ok {
		return c.copies == 0
	}
	return c.struckStored
}

// summary names, for each client, what its caller must not believe.
func (t *table) summary() string {
	var b strings.Builder
	b.WriteString("## What a caller must not believe\n\n")
	for _, c := range t.clients {
		var failed, sent, twice []string
		for _, f := range faults {
			x := t.cells[f.name][c]
			switch {
			case !x.fired:
			case x.copies > 1:
				twice = append(twice, f.name)
			case x.wrong() && x.said.ok:
				sent = append(sent, f.name)
			case x.wrong():
				failed = append(failed, f.name)
			}
		}
		fmt.Fprintf(&b, "- %s: says failed of a delivered mail in %d cases%s; says sent of a mail that nobody has in %d%s; delivers twice by itself in %d%s.\n",
			c, len(failed), list(failed), len(sent), list(sent), len(twice), list(twice))
	}
	return b.String()
}

func list(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " (" + strings.Join(names, "; ") + ")"
}

// env is where external clients live.
type env struct {
	dir        string
	nodemailer string
}

func (e env) file(name string, data []byte) (string, error) {
	p := filepath.Join(e.dir, name)
	return p, os.WriteFile(p, data, 0o644)
}
