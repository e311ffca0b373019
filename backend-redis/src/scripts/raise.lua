#!lua
-- Gives a lock that its owner holds the token that the majority agreed on.
-- KEYS: 1 the last token, 2 the lock
-- ARGV: 1 owner, 2 token, 3 how long to keep the last token in ms
-- Returns 1, or 0 if the owner does not hold it.
local held = redis.call('GET', KEYS[2])
if not held or string.sub(held, 1, 32) ~= ARGV[1] then return 0 end
local wanted = string.sub(held, -1) == '!' and '!' or ''
redis.call('SET', KEYS[2], ARGV[1] .. ':' .. ARGV[2] .. wanted, 'KEEPTTL')
local last, marks = string.match(redis.call('GET', KEYS[1]) or '0', '^(%d+)(.*)')
if tonumber(last) < tonumber(ARGV[2]) then
  local time = redis.call('TIME')
  local ahead = ARGV[2] - (time[1] * 1000000 + time[2])
  local keep = ARGV[3] + math.max(0, math.ceil(ahead / 1000))
  redis.call('SET', KEYS[1], ARGV[2] .. marks, 'PX', string.format('%.0f', keep))
end
return 1
