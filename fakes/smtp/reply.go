package smtp

import (
	"bytes"
	"net"
	"strconv"
	"strings"
	"time"

	gosmtp "github.com/emersion/go-smtp"

	"mailproof/fakes/script"
	"mailproof/fakes/socket"
)

// reply is one answer of one line.
type reply struct {
	code     int
	enhanced string // "4.7.1", "" for none
	text     string
}

func (r reply) line() string { return strconv.Itoa(r.code) + " " + r.message() }

func (r reply) message() string {
	if r.enhanced == "" {
		return r.text
	}
	return r.enhanced + " " + r.text
}

// smtpError makes go-smtp write the answer as it is: the enhanced code is part
// of the text.
func (r reply) smtpError() *gosmtp.SMTPError {
	return &gosmtp.SMTPError{Code: r.code, Message: r.message(), EnhancedCode: gosmtp.NoEnhancedCode}
}

// usual texts and enhanced codes (RFC 5321 4.2.3, RFC 3463) for the codes that
// a script may ask for.
var usual = map[int]reply{
	250: {250, "2.0.0", "Ok"},
	421: {421, "4.3.2", "Service not available, closing transmission channel"},
	432: {432, "4.3.2", "Concurrent connections limit exceeded"},
	450: {450, "4.2.1", "Mailbox unavailable, try later"},
	451: {451, "4.3.0", "Local error in processing"},
	452: {452, "4.5.3", "Too many recipients"},
	454: {454, "4.7.0", "Temporary authentication failure"},
	455: {455, "4.5.4", "Unable to accommodate parameters"},
	500: {500, "5.5.2", "Syntax error"},
	502: {502, "5.5.1", "Command not implemented"},
	503: {503, "5.5.1", "Bad sequence of commands"},
	504: {504, "5.5.4", "Parameter not implemented"},
	521: {521, "5.3.2", "Server does not accept mail"},
	530: {530, "5.7.0", "Authentication required"},
	535: {535, "5.7.8", "Authentication credentials invalid"},
	550: {550, "5.1.1", "No such user"},
	552: {552, "5.2.2", "Mailbox full"},
	553: {553, "5.1.3", "Mailbox name not allowed"},
	554: {554, "5.6.0", "Transaction failed"},
	555: {555, "5.5.4", "Parameters not recognized"},
}

// scripted is the answer that an action asks for.
func scripted(a script.Action) reply {
	code := a.Code
	switch {
	case code != 0:
	case a.Kind == script.Greylist:
		code, a.Enhanced, a.Text = 451, orElse(a.Enhanced, "4.7.1"), orElse(a.Text, "Greylisted, try again later")
	case a.Kind == script.Rate:
		code, a.Enhanced, a.Text = 421, orElse(a.Enhanced, "4.7.0"), orElse(a.Text, "Rate limit exceeded, try again later")
	}
	r, ok := usual[code]
	if !ok {
		r = reply{code, strconv.Itoa(code/100) + ".0.0", "Scripted answer"}
	}
	r.enhanced, r.text = orElse(a.Enhanced, r.enhanced), oneLine(orElse(a.Text, r.text))
	return r
}

func orElse(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

// oneLine keeps a scripted text from becoming a second answer.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\r' || r == '\n' {
			return ' '
		}
		return r
	}, s)
}

// Write takes go-smtp's answers, line by line, and sends each when it is whole.
func (c *conn) Write(p []byte) (int, error) {
	if err := c.goneErr(); err != nil {
		return 0, err
	}
	c.reply = append(c.reply, p...)
	if len(p) > 3 && p[3] == '-' {
		return len(p), nil
	}
	whole := c.reply
	c.reply = c.reply[:0]
	if !c.greeted {
		return len(p), c.greet(whole)
	}
	if c.verb == "EHLO" || c.verb == "HELO" {
		whole = c.capabilities(whole)
	}
	if err := c.send(whole); err != nil {
		return 0, err
	}
	c.afterReply(whole)
	return len(p), nil
}

// greet asks the rules of the connection before the greeting leaves.
func (c *conn) greet(greeting []byte) error {
	c.greeted = true
	if c.crowded {
		c.closeAfter = true
		return c.answer(reply{421, "4.7.0", "Too many connections, try again later"})
	}
	out := c.at(c.event(StageConnect))
	switch {
	case out.gone:
		return net.ErrClosed
	case out.answer != nil:
		// RFC 5321 3.1 lets a server that greeted with 554 wait for QUIT; this
		// one closes, as most do.
		c.closeAfter = true
		return c.answer(*out.answer)
	}
	return c.send(greeting)
}

// afterReply follows what go-smtp's answer means for the next bytes.
func (c *conn) afterReply(whole []byte) {
	switch {
	case bytes.HasPrefix(whole, []byte("354")):
		c.mode = modeData
		if tx := c.tx(); tx != nil {
			tx.update(func(a *Attempt) { a.Stage = string(StageData) })
		}
	case bytes.HasPrefix(whole, []byte("334")):
		c.inAuth = true
	}
}

// answer sends an answer of our own.
func (c *conn) answer(r reply) error { return c.send([]byte(r.line() + "\r\n")) }

// send sends one whole answer, changed as the rules of its stage asked, and
// ends the rows that it ends.
func (c *conn) send(whole []byte) error {
	mods, ends := c.mods, c.takePending()
	c.mods = nil
	first := firstLine(whole)
	if len(ends) > 0 {
		gone := c.waited && socket.PeerGone(c.tcp)
		for _, e := range ends {
			e.before(first, willBeWhole(mods), gone)
		}
	}
	c.waited = false
	if len(ends) == 0 && len(mods) == 0 && !c.closeAfter && c.moreCommands() {
		c.out = append(c.out, whole...)
		return nil
	}
	written, err := c.deliver(whole, mods)
	if len(ends) > 0 {
		c.replied(ends, written)
	}
	if err == nil && c.closeAfter {
		c.kill(false)
	}
	return err
}

// moreCommands reports whether another whole command has been read already. A
// client that pipelines gets its answers in one piece then, as RFC 2920 3.2
// wants it; answers that end a row, or that a rule changes, never wait.
func (c *conn) moreCommands() bool {
	n := c.br.Buffered()
	if n == 0 || len(c.out) > 4096 {
		return false
	}
	b, _ := c.br.Peek(n)
	return bytes.IndexByte(b, '\n') >= 0
}

// flush sends the answers that waited.
func (c *conn) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	out := c.out
	c.out = c.out[:0]
	return c.writeNow(out)
}

// takePending takes the rows that the next answer ends.
func (c *conn) takePending() []*rowEnd {
	c.mu.Lock()
	defer c.mu.Unlock()
	ends := c.pending
	c.pending = nil
	return ends
}

// replied asks the rules of the stage after the final answer, then ends the
// rows, then lets the rules strike: a row is ended before a hold that follows.
func (c *conn) replied(ends []*rowEnd, written bool) {
	now := c.srv.opt.Clock()
	tx := ends[0].tx
	if !written || !ends[0].final || c.srv.engine.Quiet(tx.rcpts...) {
		for _, e := range ends {
			e.after(now, written)
		}
		return
	}
	ev := c.txEvent(tx, StageReplied)
	strikes := c.srv.engine.Decide(ev)
	for _, s := range strikes {
		tx.note(ev, strike{s.Action.Name(), s.Rule})
	}
	for _, e := range ends {
		e.after(now, written)
	}
	c.strikeAll(ev, strikes)
}

func firstLine(whole []byte) string {
	line, _, _ := bytes.Cut(whole, []byte("\r\n"))
	return string(line)
}

// willBeWhole is false when the answer will not leave as it is.
func willBeWhole(mods []script.Action) bool {
	for _, m := range mods {
		switch m.Kind {
		case script.Swallow, script.Cut, script.Garbage:
			return false
		}
	}
	return true
}

// deliver writes the answer under its changes. written says whether all of it
// was handed to the socket.
func (c *conn) deliver(whole []byte, mods []script.Action) (written bool, err error) {
	var drip time.Duration
	for _, m := range mods {
		switch m.Kind {
		case script.Swallow:
			return false, c.flush()
		case script.Cut:
			n := len(whole) / 2
			if m.Bytes > 0 {
				n = int(min(m.Bytes, int64(len(whole))))
			}
			_ = c.write(whole[:n])
			c.kill(false)
			return false, net.ErrClosed
		case script.Garbage:
			return false, c.write(garbage(m))
		case script.Drip:
			drip = m.For.Or(100 * time.Millisecond)
		case Mismatch:
			whole = mismatched(whole)
		case Disagree:
			whole = disagreeing(whole)
		case StripCaps:
			whole = stripped(whole, m.Strip)
		}
	}
	if drip > 0 {
		err = c.drip(whole, drip)
	} else {
		err = c.write(whole)
	}
	return err == nil, err
}

// write sends b behind the answers that waited.
func (c *conn) write(b []byte) error {
	if len(c.out) == 0 {
		return c.writeNow(b)
	}
	c.out = append(c.out, b...)
	return c.flush()
}

func (c *conn) writeNow(b []byte) error {
	// As for reading: a deadline that is good enough stays.
	if t := time.Now().Add(c.srv.opt.WriteTimeout); t.Sub(c.writeDeadline) > c.srv.opt.WriteTimeout/16 {
		_ = c.tcp.SetWriteDeadline(t)
		c.writeDeadline = t
	}
	_, err := c.rw.Write(b)
	return err
}

func (c *conn) drip(b []byte, step time.Duration) error {
	for i := range b {
		if i > 0 && !c.wait(step) {
			return net.ErrClosed
		}
		if err := c.write(b[i : i+1]); err != nil {
			return err
		}
	}
	return nil
}

// garbage is what a broken middlebox might send: no code, high bytes, and no
// end of line unless the script's text brings one.
func garbage(a script.Action) []byte {
	if a.Text != "" {
		return []byte(a.Text + "\r\n")
	}
	return []byte("\x00\xff\xfe<html>502 Bad Gateway</html>\r\n")
}

// mismatched is the answer in two lines whose codes differ (RFC 5321 4.2.1
// wants them equal).
func mismatched(whole []byte) []byte {
	other := "451-4.3.0 On second thought\r\n"
	if len(whole) > 0 && whole[0] == '4' {
		other = "250-2.0.0 On second thought\r\n"
	}
	return append([]byte(other), whole...)
}

// disagreeing puts the class of the enhanced code of the last line at odds
// with the basic code.
func disagreeing(whole []byte) []byte {
	line := bytes.LastIndex(bytes.TrimRight(whole, "\r\n"), []byte("\n")) + 1
	b := append([]byte(nil), whole...)
	if len(b) < line+6 || b[line+5] != '.' {
		return b
	}
	if b[line] == '4' || b[line] == '2' {
		b[line+4] = '5'
	} else {
		b[line+4] = '4'
	}
	return b
}

// capabilities adds STARTTLS to the answer to EHLO, which go-smtp does not
// know to be on offer.
func (c *conn) capabilities(whole []byte) []byte {
	if c.verb != "EHLO" || c.srv.opt.TLS == nil || c.secured || !bytes.HasPrefix(whole, []byte("250-")) {
		return whole
	}
	first := bytes.IndexByte(whole, '\n') + 1
	out := append([]byte(nil), whole[:first]...)
	out = append(out, "250-STARTTLS\r\n"...)
	return append(out, whole[first:]...)
}

// stripped removes capabilities from an answer to EHLO.
func stripped(whole []byte, names []string) []byte {
	lines := strings.Split(strings.TrimRight(string(whole), "\r\n"), "\r\n")
	kept := lines[:1]
	for _, l := range lines[1:] {
		word, _, _ := strings.Cut(l[min(4, len(l)):], " ")
		if !containsFold(names, word) {
			kept = append(kept, l)
		}
	}
	for i, l := range kept {
		sep := "-"
		if i == len(kept)-1 {
			sep = " "
		}
		if len(l) > 3 {
			kept[i] = l[:3] + sep + l[4:]
		}
	}
	return []byte(strings.Join(kept, "\r\n") + "\r\n")
}

func containsFold(list []string, s string) bool {
	for _, x := range list {
		if strings.EqualFold(x, s) {
			return true
		}
	}
	return false
}
