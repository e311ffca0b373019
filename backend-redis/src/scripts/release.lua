#!lua flags=allow-oom
-- Frees locks of their owners. Runs on a server without free memory as well.
-- KEYS: for each lock the mark of a request that was given up, the lock
-- ARGV: 1 how long a mark lasts in ms, 2 PUBLISH or SPUBLISH, 3 channel, then for each lock
--       owner, what to publish
-- Returns for each lock 1 if its owner had it, otherwise 0.
local freed = {}
for n = 1, #KEYS / 2 do
  local lock, owner = KEYS[2 * n], ARGV[2 * n + 2]
  local held = redis.pcall('GET', lock)
  if type(held) == 'string' and string.sub(held, 1, 32) == owner then
    redis.call('DEL', lock)
    if string.sub(held, -1) == '!' then redis.call(ARGV[2], ARGV[3], ARGV[2 * n + 3]) end
    freed[n] = 1
  else
    -- its request may still be on the way, and must not take what nobody would free
    redis.call('SET', KEYS[2 * n - 1], '1', 'PX', ARGV[1])
    freed[n] = 0
  end
end
return freed
