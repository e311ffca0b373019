#!lua flags=allow-oom
-- Frees locks of their owners. Runs on a server without free memory as well.
-- KEYS: 1 the last token of the leases of the slot, 2.. the locks
-- ARGV: 1 how long a mark lasts in ms (0: none is made), 2 PUBLISH or SPUBLISH, 3 channel, then
--       for each lock owner, what to publish
-- Returns for each lock 1 if its owner had it, 2 if somebody wanted it besides, otherwise 0.
local call, sub, KEYS, ARGV = redis.call, string.sub, KEYS, ARGV
local freed = {}
for n = 2, #KEYS do
  local lock, owner = KEYS[n], ARGV[2 * n]
  local held = redis.pcall('GET', lock)
  if type(held) == 'string' and sub(held, 1, 32) == owner then
    call('DEL', lock)
    freed[n - 1] = 1
    if sub(held, -1) == '!' then
      call(ARGV[2], ARGV[3], ARGV[2 * n + 1])
      freed[n - 1] = 2
    end
  else
    freed[n - 1] = 0
    if ARGV[1] ~= '0' then
      -- its request may still be on the way, and must not take what nobody would free
      call('SET', sub(KEYS[1], 1, -11) .. 'gone:' .. owner, '1', 'PX', ARGV[1])
      local time = call('TIME')
      local now = time[1] * 1000000 + time[2]
      local last = string.match(call('GET', KEYS[1]) or '', '^%d+')
      local marked = (last or string.format('%.0f', now)) .. '!'
        .. string.format('%.0f', now + ARGV[1] * 1000)
      if last then
        call('SET', KEYS[1], marked, 'KEEPTTL')
        call('PEXPIRE', KEYS[1], ARGV[1], 'GT')
      else
        call('SET', KEYS[1], marked, 'PX', ARGV[1])
      end
    end
  end
end
return freed
